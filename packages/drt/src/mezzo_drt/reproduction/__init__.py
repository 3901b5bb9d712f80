"""What the paper of DRT printed and claims, and what we measure to answer it."""
