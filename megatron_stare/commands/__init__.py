"""What the commands of the command line do, except for training."""
