"""Ops: functions of tensors without weights, each in a folder of its own."""
