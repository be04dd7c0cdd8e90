"""One file an op: `cases(device, quick)` yields what to time. Found by name; no list names them."""
