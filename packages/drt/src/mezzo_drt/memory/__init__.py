"""The memory of complete chunks: on the device, in the host's memory, or in files on a disk."""
