"""Two attention functions, checked: one reads padding, the other only tokens."""

import torch
from torch import Tensor

from vmmkv.testing import check_attention


# --8<-- [start:masked]
def masked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Gives the padding a weight of zero."""
    seen = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
    scores = torch.einsum("bqhd,bthd->bhqt", q, k) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqt,bthd->bqhd", weights, v)
    # --8<-- [end:masked]


def sliced(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Looks at the tokens alone."""
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        scores = torch.einsum("qhd,thd->hqt", q[row], k[row, :length]) * q.shape[3] ** -0.5
        out[row] = torch.einsum("hqt,thd->qhd", scores.softmax(-1), v[row, :length])
    return out


# --8<-- [start:check]
if __name__ == "__main__":  # another process imports this file
    report = check_attention(masked, device="cpu")
    print(report)
    assert report.faults == [
        "fails on lengths of 0",
        "lets NaN behind lengths through",
        "reads past the end by more than 1,024 tokens",
    ]
    assert check_attention(sliced, device="cpu").right
    # --8<-- [end:check]
