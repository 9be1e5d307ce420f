"""Imported first by processes that a script starts: Ctrl-C is for the script, which ends them."""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
