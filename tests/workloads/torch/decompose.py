"""Trains a model for some steps and says what each of its tensors is for at the end of the last one.

The best weights are kept, as training loops do: copies that nothing computes with. With --recipe, gradients are clipped,
an average of the weights is kept, and the loss is one that has no operator of its own in the backward pass.

Truth: `tensor` with the kind: weight, gradient, optimizer_state or activation.
"""

import os

from workload import Workload, options

WIDTH = 256


def build(torch, name):
    if name == "mlp":
        layers = [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH)]
        return torch.nn.Sequential(*layers), (64, WIDTH)
    if name == "linear":
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)), (64, WIDTH)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return layer, (4, 16, WIDTH)


def main():
    parser = options(__doc__)
    parser.add_argument("--model", choices=["mlp", "linear", "transformer"], default="mlp")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--recipe", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    run = Workload(parser.parse_args(), warm=True)
    torch, args = run.torch, run.args
    model, shape = build(torch, args.model)
    model = model.to("npu")
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    best, averages = [], []
    for step in range(1, args.steps + 1):
        with run.range("step start"):
            batch, target = torch.randn(shape).to("npu"), torch.randn(shape).to("npu")
            optimizer.zero_grad()
            with run.range("forward"):
                output = model(batch)
                if args.recipe:
                    loss = (output * output).mean()
                else:
                    loss = torch.nn.functional.mse_loss(output, target)
            with run.range("backward"):
                loss.backward()
            if args.recipe:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with run.range("optimizer"):
                optimizer.step()
            if args.recipe:
                with torch.no_grad():
                    averages = averages or [parameter.clone() for parameter in model.parameters()]
                    for average, parameter in zip(averages, model.parameters()):
                        average.mul_(0.9).add_(parameter, alpha=0.1)
            if step == 3:
                best = [value.clone() for value in model.state_dict().values()]
            run.npu.synchronize()
            if step == args.steps:
                break

    def tell(kind, tensor):
        if torch.is_tensor(tensor) and tensor.device.type == "npu":
            run.tell_block("tensor", tensor, kind=kind)

    for parameter in model.parameters():
        tell("weight", parameter)
        tell("gradient", parameter.grad)
        for value in optimizer.state[parameter].values():
            tell("optimizer_state", value)
    for tensor in [batch, target, output, loss, *best, *averages]:
        tell("activation", tensor)
    run.tell("end")
    os._exit(0)


main()
