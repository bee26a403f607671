"""What the controller runs on other hosts over ssh: a check before a run, and a supervisor of each process (`laminar.remote`)."""
