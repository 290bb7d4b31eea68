"""Two devices of one process, each with a leak of its own size in every step. Truth: `leak` with the device."""

from workload import MIB, Workload, options


def main():
    parser = options(__doc__)
    parser.add_argument("--other-device", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    run = Workload(args)
    leaked = []
    for step in range(1, args.steps + 1):
        with run.range("step start"):
            for device, nbytes in [(args.device, MIB), (args.other_device, 3 * MIB)]:
                with run.npu.device(device):
                    scratch = run.empty(5 * MIB)
                    leaked.append(run.empty(nbytes))
                    run.tell_block("leak", leaked[-1], device=device, step=step)
                    # Across: written on the other device's behalf.
                    leaked[-1].copy_(scratch[:nbytes])
                    del scratch
                    run.mark(f"end of step {step}", step=step)
    run.npu.synchronize()
    run.end()


main()
