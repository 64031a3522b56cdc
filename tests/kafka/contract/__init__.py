"""What every member of a group does, whoever plays it."""
