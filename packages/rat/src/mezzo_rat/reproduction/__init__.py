"""What the paper of RAT printed and claims, and what we measure to answer it."""
