"""tests of answers"""
