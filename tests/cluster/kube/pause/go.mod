module rlrun.io/testcluster/pause

go 1.24.0
