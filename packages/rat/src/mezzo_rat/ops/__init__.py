"""The ops of RAT: functions on tensors, without weights."""
