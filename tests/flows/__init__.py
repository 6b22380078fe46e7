"""Tests of flows, their trainer process, the command line and the local stack."""
