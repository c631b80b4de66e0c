"""User-facing code: the command line, reports, exports, `softcell run` and sweeps. The core never imports it."""
