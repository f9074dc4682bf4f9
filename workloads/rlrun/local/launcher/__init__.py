"""Parts of one call of `rlrun local`: its output (`call`), the ports and GPUs of its processes (`place`), and its main loop (`course`)."""
