"""`cactus-hf plot`, and what all pictures of the package have in common."""
