"""How a case is measured: who takes part, the programs, the lock on the device, interleaved samples."""
