"""A `Contract` for each op of the registry, by its name: what it is held to, on a CPU and on a card."""

from contract.op_contract import Contract
from contract.op_samples import attention, conv, elementwise, matmul, norm, quant

CONTRACTS: dict[str, Contract] = {
    name: contract
    for group in (elementwise, quant, norm, matmul, conv, attention)
    for name, contract in group.CONTRACTS.items()
}
