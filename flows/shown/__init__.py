"""What people see of a run: on the terminal and in the Prefect UI."""
