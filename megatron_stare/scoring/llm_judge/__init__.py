"""Another language model as a reward: its questions, its answers, and what they are worth."""
