"""One owned partition: state machine, ledger of offsets, recovery on assignment."""
