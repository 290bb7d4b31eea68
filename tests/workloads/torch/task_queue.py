"""Calls operators that want a workspace, which with TASK_QUEUE_ENABLE=2 torch_npu asks for on its task queue's thread.

Truth: `call` for each workspace, in the order of the calls, with the stack on which the operator was called. Then `threads` of
the same operator, all at once: how often each line calls it.
"""

import threading

from workload import Workload, options


def main():
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    run = Workload(args, warm=True)
    torch = run.torch

    def matrix():
        return torch.randn(64, 64).to("npu")

    a, b, weight = matrix(), matrix(), matrix().requires_grad_()

    def call(stack):
        run.tell("call", python=stack)

    def product():
        # Each call and its truth on one line: their stacks are to be the same.
        result, stack = torch.mm(a, b), run.stack()
        call(stack)
        return torch.softmax(result, 1)

    def recursive(depth):
        if depth:
            return recursive(depth - 1)
        result, stack = torch.mm(b, a), run.stack()
        call(stack)
        return result.add_(1)

    def step():
        output, stack = torch.mm(a, weight), run.stack()
        call(stack)
        loss = output.sum()
        _, stack = loss.backward(), run.stack()
        call(stack)
        weight.grad = None

    for round in range(args.rounds):
        product()
        recursive(round % 4)
        step()
    run.npu.synchronize()

    def here():
        return run.stack()[1]

    def repeat(product):
        run.npu.set_device(args.device)
        for _ in range(args.rounds):
            product()

    products = [
        lambda: (torch.mm(a, b), here())[1],
        lambda: (torch.mm(a, b), here())[1],
        lambda: (torch.mm(a, b), here())[1],
    ]
    lines = [product() for product in products]
    threads = [threading.Thread(target=repeat, args=(product,)) for product in products]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.npu.synchronize()
    for line in lines:
        run.tell("threads", calls=args.rounds + 1, python=[line])
    run.end()


main()
