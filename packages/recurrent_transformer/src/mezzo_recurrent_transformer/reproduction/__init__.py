"""What the paper of Recurrent Transformer printed and claims, and what we measure to answer it."""
