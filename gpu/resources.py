"""The resources of every kernel that a server launches: registers, spills, shared memory.

    python -m gpu.resources

serves Llama 3.1 8B, without numbers, by a GPU that is not there: `warm_up` launches every variant
of every kernel, and each is compiled instead (crosscompile.py says what the columns mean). A row
shows a kernel with its constants: M rows and N keys of attention's tiles, bits of keys, values and
weights, …

What the tests hold: nothing spills, all fits into shared memory, and the loops of attention and of
the products copy ahead.
"""

from collections.abc import Iterable

from gpu.crosscompile import Report

NAMED = ("K_BITS", "V_BITS", "M", "N", "SPLIT", "BITS", "ROWS", "COLS", "GROUP")  # constants


def print_reports(reports: Iterable[Report]) -> None:
    columns = "registers", "spills", "shared", "ahead", "programs"
    print(f"{'kernel':14}", *(f"{column:>9}" for column in columns))
    for report in reports:
        numbers = [getattr(report, column) for column in columns]
        constants = [
            f"{name}={report.constants[name]}" for name in NAMED if name in report.constants
        ]
        print(f"{report.kernel:14}", *(f"{number:>9,}" for number in numbers), " ", *constants)


if __name__ == "__main__":
    import torch

    from checkpoint.config import Config
    from checkpoint.formats import Quantization
    from gpu import GPU, warm_up
    from gpu.crosscompile import compile_launches
    from model import Llama
    from paged import PagedCache

    config = Config(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    for bits, kv in ((16, (16, 16)), (8, (8, 4))):
        shape = config.quantized(Quantization(bits)) if bits < 16 else config
        llama = Llama(shape, "meta", torch.bfloat16, seed=None, ops=GPU(records=False))
        cache = PagedCache.of(llama, 16, bits=kv)
        print(f"weights of {bits} bits, keys of {kv[0]}, values of {kv[1]}")
        print_reports(compile_launches(lambda: warm_up(llama.pack_weights(), cache)))
