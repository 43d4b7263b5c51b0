"""`cactus-hf eval`: scores of acceptance rules on benchmark tasks, beside what they accept, spend and gain."""
