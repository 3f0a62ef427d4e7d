"""TransformerEngine's names that this package leaves out for good."""

WHY = {
    "CusolverMpCtx": "there is no cuSOLVERMp here",
    "ManualOffloadSynchronizer": "use torch's torch.autograd.graph.save_on_cpu",
    "get_cpu_offload_context": "use torch's torch.autograd.graph.save_on_cpu",
    "mark_not_offload": "use torch's torch.autograd.graph.save_on_cpu",
    "onnx_export": "use torch.export, which takes these modules as they are",
}
