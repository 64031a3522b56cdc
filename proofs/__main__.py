"""`python -m proofs`: the commands behind `make demo`, `bench`, `chaos` and `sim`."""

from dagster_rebalance.cli.app import run

COMMANDS = {
    "bench": "proofs.bench.command",
    "chaos": "proofs.chaos.command",
    "demo": "proofs.demo.command",
    "life": "proofs.simulation.life",
    "simulate": "proofs.simulation.command",
}

if __name__ == "__main__":
    run(COMMANDS)
