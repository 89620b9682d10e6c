"""The Megatron-Core model that learns: built, loaded, fed, updated, saved and converted."""
