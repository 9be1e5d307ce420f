// nccl.h names it, and needs nothing of it.
