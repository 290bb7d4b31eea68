"""Allocates until the device is full, then frees everything and goes on. Truth: `oom` with the error's text."""

from workload import MIB, Workload, options


def main():
    parser = options(__doc__)
    parser.add_argument("--block-mib", type=int, default=1024)
    run = Workload(parser.parse_args())
    held = []
    run.mark("before")
    try:
        while True:
            held.append(run.empty(run.args.block_mib * MIB))
    except RuntimeError as error:
        run.tell("oom", blocks=len(held), block=run.args.block_mib * MIB, error=str(error).splitlines()[0])
    run.mark("full")
    held.clear()
    run.npu.empty_cache()
    run.mark("empty")
    held.append(run.empty(run.args.block_mib * MIB))
    run.tell_block("keep", held[0], kind="after")
    run.mark("after")
    run.end()


main()
