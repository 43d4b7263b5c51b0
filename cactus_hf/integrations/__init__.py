"""The acceptance rules inside other engines."""
