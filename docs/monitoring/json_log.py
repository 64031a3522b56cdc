"""Write the log of the package as JSON."""

import logging

from pythonjsonlogger.json import JsonFormatter

handler = logging.StreamHandler()
handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
log = logging.getLogger("dagster_rebalance")
log.addHandler(handler)
log.setLevel(logging.INFO)  # DEBUG has each claim and commit, too
log.propagate = False
