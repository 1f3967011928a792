"""One site of torchft's DiLoCo in `thin_link.py`: the same model, batch, optimizer and number of inner steps.

torchft needs an environment of its own: python -m venv --system-site-packages, pip install --no-deps torchft-nightly.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from thin_link_model import configuration, rows
from thin_link_namespaces import LINK, address

LIGHTHOUSE_PORT, STORE_PORT = 29610, 29611
PATIENCE = timedelta(seconds=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    torch.set_num_threads(1)
    here = address(options.rank)
    lighthouse = None
    if options.rank == 0:
        lighthouse = LighthouseServer(
            bind=f"{here}:{LIGHTHOUSE_PORT}", min_replicas=options.sites, join_timeout_ms=60_000
        )
    store = TCPStore(here, STORE_PORT, is_master=True, wait_for_workers=False)
    device, run = torch.device("cpu"), configuration(options.sites)
    model = Decoder(run.model)
    materialize(model, run.model, device, run.seed)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE), load_state_dict=None, state_dict=None, min_replica_size=options.sites,
        use_async_quorum=False, timeout=PATIENCE, quorum_timeout=PATIENCE, connect_timeout=PATIENCE, rank=0,
        world_size=1, store_addr=here, store_port=STORE_PORT, lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE_PORT}",
        replica_id=f"site{options.rank}", hostname=here, init_sync=False,
    )  # fmt: skip
    batch = rows(options.rank, device)
    took = []
    with DiLoCo(manager, [model], inner, outer, sync_every=options.every):
        for _ in range(options.rounds + 1):  # the first connects
            began = time.monotonic()
            for _ in range(options.every):
                loss = model(batch.tokens_BT, batch.targets_BT, batch.positions_BT, batch.documents)
                (loss / batch.targets_BT.numel()).backward()
                inner.step()
                inner.zero_grad()
            took.append(time.monotonic() - began)
    if options.rank == 0:
        steps = options.rounds * options.every
        print(json.dumps({"step_s": sum(took[1:]) / steps, "steps": steps + options.every}), flush=True)
    time.sleep(2)  # the others still ask the lighthouse
    manager.shutdown(wait=False)
    del store, lighthouse
    os._exit(0)


if __name__ == "__main__":
    main()
