"""What crosses processes and hosts: messages, their bytes, streams and who may open one."""
