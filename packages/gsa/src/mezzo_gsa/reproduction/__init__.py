"""What the paper of GSA printed and claims, and what we measure to answer it."""
