"""A trainer that goes into its second round, and then sends nothing."""

import asyncio

import run_trainer
import swarm.averager
from arguments import parse_arguments


class SilentRunner(swarm.averager.FailFastAllReduceRunner):
    rounds = 0  # of this process, as each averager has one of its own

    async def run(self):
        SilentRunner.rounds += 1
        if SilentRunner.rounds > 1:
            print("silent from now on", flush=True)
            await asyncio.sleep(600)
        async for update in super().run():
            yield update


swarm.averager.FailFastAllReduceRunner = SilentRunner
groups = parse_arguments(*run_trainer.GROUPS)
with run_trainer.clean_end():
    run_trainer.main(*groups)
