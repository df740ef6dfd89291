"""A make-believe accelerator: torch's PrivateUse1 over host memory, for tests of everything that a card asks of the program.

``build.install`` shows it to subprocesses under a name such as ``npu``; the process that calls it stays without. In a shell::

    eval "$(python -m tests.fake_device npu)"            # and any switches behind the name
    python launch.py --device npu --prompt "17 + 25 = ?" --dtype float32

``FAKE_DEVICE=npu,musa,`` gives rank 0 an npu, rank 1 a musa and rank 2 none, as on hosts with different plugins.

It has two cards of 256 MiB (``FAKE_DEVICE_BYTES``). Every operator runs torch's CPU kernel, so tokens equal the CPU's. A card's memory
is full of 0x7f when it is allocated, and a host that reads it gets a segmentation fault. Operators refuse tensors of different
devices. Kernels run at once and in the order of their calls, whatever their streams: a missing wait between two streams is not found. The
process group of ``npu`` (``hccl``), ``musa`` (``mccl``) and ``mlu`` (``cncl``) refuses two ranks on one card; other names
have no group. Switches (``FAKE_DEVICE_SWITCHES``, separated by commas):

- ``no-float64``: tensors of this type are refused.
- ``late-copies``: the target of a non-blocking download is poisoned until something waits; waiting fails if the source of a non-blocking
  upload was changed meanwhile.
- ``no-memory-info``: ``torch.accelerator`` has no memory figures, as with torch_musa; ``torch.NAME`` has.
- ``one-card``: each rank sees one card, as with ``srun --gpus-per-task=1``.
- ``does-not-load``: the plugin raises.

Also ``ASCEND_RT_VISIBLE_DEVICES`` (``MUSA_…``, ``NAME_…``) chooses cards. With ``FAKE_DEVICE_COUNTS=FOLDER``, each process writes its copies
and waits by Python line to ``FOLDER/PID.json``; in a process they are ``torch.npu.counts.snapshot()``.
"""
