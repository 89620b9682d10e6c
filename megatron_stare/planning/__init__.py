"""Will it fit, and how long will it take: a run's memory and time, before anything is launched."""
