"""The ops of GSA and its family: functions on tensors, without weights."""
