"""What a console can look at: a live controller, a virtual cluster, a recorded run."""
