# SPDX-License-Identifier: Apache-2.0
"""rafter.patch of models whose weights are spread over ranks: tensor parallelism of transformers and of
PyTorch, and FSDP2. Run by ranks.py."""
import copy

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import rafter
import ranks
from support import close

VOCABULARY, TOKENS = 96, 12


def transformers():
    try:
        import transformers as module
    except ImportError:
        raise ranks.Skip("transformers is not installed") from None
    module.logging.set_verbosity_error()
    return module


def llama(tied=False, **more):
    module = transformers()
    torch.manual_seed(0)
    return module.LlamaForCausalLM(module.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=48, num_hidden_layers=1, num_attention_heads=12,
        num_key_value_heads=12, tie_word_embeddings=tied, **more)).train()


def batch(world, seed=0):
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed)).to(world.device)
    labels = ids.clone()
    labels[0, :5] = -100
    return dict(input_ids=ids, labels=labels)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model, **inputs):
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), {name: whole(gradient).clone() for name, gradient in gradients.items()}


def compare(found, wanted):
    (loss, gradients), (expected, others) = found, wanted
    close(loss, expected.double(), scale=4)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        close(gradient, others[name].double(), scale=40, atol=2e-6)


def tensor_parallel_plan(model, size):
    """What apply_tensor_parallelism takes after the mesh: from transformers 5.23 on, the plan by the names of the
    model's own modules; before, nothing."""
    if not hasattr(model, "_resolve_parallel_plans"):
        return ()
    from transformers.distributed import DistributedConfig
    return model._resolve_parallel_plans(DistributedConfig(tp_size=size, tp_plan="auto"))[:1]


def check_tensor_parallel_model(world):
    """tp_plan of transformers cuts the output layer by classes. Its weight is never gathered, nor are
    logits: what a rank sends is smaller than either."""
    from torch.distributed.device_mesh import init_device_mesh
    try:  # from_pretrained(tp_plan="auto") calls this, but needs accelerate
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise ranks.Skip("this transformers cuts its models in another way") from None
    one, model = llama().to(world.device), llama().to(world.device)
    apply_tensor_parallelism(model, init_device_mesh(world.device, (world.size,)), *tensor_parallel_plan(model, world.size))
    assert isinstance(model.lm_head.weight, DTensor) and model.lm_head.weight.placements == (Shard(0),)
    inputs = batch(world)
    wanted, plain = step(one, **inputs), step(model, **inputs)
    compare(plain, wanted)
    forward = model.lm_head.forward
    rafter.patch(model)
    with CommDebugMode() as moved:
        found = model(**inputs)
    assert found.logits is None and not isinstance(found.loss, DTensor)
    gathers = [op for op in map(str, moved.get_comm_counts()) if "functional" in op and "all_gather" in op]
    assert not gathers  # unpatched: one, of the logits
    found = step(model, **inputs)
    world.same_bits(found[0])
    compare(found, wanted)
    with torch.no_grad():
        close(model(**inputs).loss, wanted[0].double(), scale=4)
    rafter.unpatch(model)
    assert model.lm_head.forward == forward
    compare(step(model, **inputs), wanted)


def check_parallelize_module(world):
    """The same by torch.distributed.tensor.parallel, with a tied weight too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    mesh = init_device_mesh(world.device, (world.size,))
    one = llama().to(world.device)
    inputs = batch(world)
    wanted = step(one, **inputs)
    model = copy.deepcopy(one)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    compare(step(model, **inputs), wanted)
    compare(step(rafter.patch(model), **inputs), wanted)


def fsdp_steps(world, patch, **policy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(world.device, (world.size,))
    model = llama().to(world.device)
    if patch == "first":
        rafter.patch(model, mode="compact")  # backward reads the weight again
    if policy.pop("head", True):
        fully_shard(model.lm_head, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh)
    if patch == "last":
        rafter.patch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, losses = batch(world, seed=world.rank), []
    for number in range(3):
        with CommDebugMode() as moved:
            loss = model(**inputs).loss
            loss.backward()
        losses.append(loss.detach())
        if number == 0:  # an evaluation leaves the model's own unit gathered for the next step
            gathered = sum(count for op, count in moved.get_comm_counts().items() if "gather" in str(op))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(**inputs).loss)
    return losses, {name: whole(p.detach()) for name, p in model.named_parameters()}, gathered


def check_fsdp_and_tensor_parallel(world):
    """A mesh of both: FSDP2 gathers the rows of this rank's classes."""
    world.skip_unless(world.size == 4, "needs 4 ranks")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    mesh = init_device_mesh(world.device, (2, 2), mesh_dim_names=("dp", "tp"))
    inputs, results = batch(world, seed=world.rank // 2), []
    for patched in (False, True):
        model = llama().to(world.device)
        parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model.lm_head, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        results.append(step(rafter.patch(model) if patched else model, **inputs))
    compare(*results)


def check_fsdp(world):
    """FSDP2 with the output layer as a unit of its own, or in that of the model; patched before and
    after. Steps agree with unpatched ones, and the head is gathered once per step."""
    for policy in (dict(), dict(head=False), dict(reshard_after_forward=False)):
        wanted = fsdp_steps(world, None, **policy)
        for patch in ("first", "last"):
            found = fsdp_steps(world, patch, **policy)
            for a, b in zip(found[0], wanted[0]):
                close(a, b.double(), scale=8)
            for name, parameter in found[1].items():
                close(parameter, wanted[1][name].double(), scale=40, atol=2e-6)
            if world.size > 1:  # the head, and the rest
                assert found[2] == (1 if policy == dict(head=False) else 2), found[2]
    # FSDP2 by itself gathers the head twice, unless it is told otherwise, as in the last policy.
    assert world.size == 1 or (wanted[2] == 2 and fsdp_steps(world, None)[2] == 3)
