"""What a run takes from its hardware: switches by capability, pipeline sends without waiting."""
