"""What the commands of the command line do, but for training."""
