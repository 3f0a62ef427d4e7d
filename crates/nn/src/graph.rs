//! Nodes of candle's graph whose backward pass is ours.
//!
//! candle keeps the arguments of every operation until the backward pass. A module of several
//! operations would keep all that lies between them, in high precision; so a module computes
//! outside the graph and puts in one node, with a closure that has what the backward pass needs and
//! nothing else.

use crate::{Result, values};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, Layout, Shape, Storage, Tensor, Var};
use std::collections::HashMap;
use std::sync::Mutex;

/// From the gradient of the result to those of the arguments, in their order; `None` for one that
/// has none.
pub(crate) type Backward = Box<dyn Fn(&Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

/// Puts a result into the graph, as a function of one or two arguments.
pub(crate) fn attach(name: &'static str, arguments: &[&Tensor], result: Tensor, backward: Backward) -> Result<Tensor> {
    let node = Node { name, result: Mutex::new(Some(result)), backward };
    Ok(match arguments {
        [a] => a.apply_op1(node)?,
        [a, b] => a.apply_op2(b, node)?,
        _ => unreachable!("nodes have one or two arguments"),
    })
}

/// The gradients of `inputs` under `f`, given that of its result: candle's own, of a graph that
/// lives only here.
///
/// What is cheap (norms, activations) is computed again rather than kept.
pub(crate) fn pull_back(
    inputs: &[&Tensor],
    f: impl FnOnce(&[Tensor]) -> candle_core::Result<Tensor>,
    gradient: &Tensor,
) -> Result<Vec<Tensor>> {
    let vars = inputs.iter().map(|x| Var::from_tensor(&x.detach())).collect::<candle_core::Result<Vec<_>>>()?;
    let arguments: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    // Of anything but a number, this is the backward pass of the sum, without the sum.
    let gradients = f(&arguments)?.mul(gradient)?.backward()?;
    let of = |var: &Var| match gradients.get(var) {
        Some(gradient) => Ok(gradient.clone()),
        None => Ok(var.zeros_like()?),
    };
    vars.iter().map(of).collect()
}

/// Bytes that candle's graph keeps for the backward pass of a tensor: the results of all operations
/// that lead to it and depend on a variable, variables left out. What nodes of this crate keep
/// beside it is counted by [`crate::Session::kept_bytes`].
pub fn graph_bytes(result: &Tensor) -> usize {
    // A reshaped or transposed tensor shares its memory with another: each memory counts once, by
    // its largest tensor.
    let mut memories: HashMap<usize, usize> = HashMap::new();
    for node in result.sorted_nodes().into_iter().filter(|node| !node.is_variable()) {
        let memory = std::ptr::from_ref(&*node.storage_and_layout().0).addr();
        let bytes = node.elem_count() * node.dtype().size_in_bytes();
        let largest = memories.entry(memory).or_default();
        *largest = bytes.max(*largest);
    }
    memories.values().sum()
}

struct Node {
    name: &'static str,
    /// Taken by the forward pass, so that the node does not keep a second copy of what it hands on.
    result: Mutex<Option<Tensor>>,
    backward: Backward,
}

impl Node {
    fn result(&self) -> candle_core::Result<(Storage, Shape)> {
        let result = self.result.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        values::stored(&result.expect("a node is put into the graph once"))
    }

    fn on_cpu(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.result()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => candle_core::bail!("{}: the result lies elsewhere than the arguments", self.name),
        }
    }

    fn on_gpu(&self) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.result()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => candle_core::bail!("{}: the result lies elsewhere than the arguments", self.name),
        }
    }

    fn gradients(&self, gradient: &Tensor) -> candle_core::Result<std::vec::IntoIter<Option<Tensor>>> {
        Ok((self.backward)(gradient)?.into_iter())
    }
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.on_gpu()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(self.gradients(gradient)?.next().flatten())
    }
}

impl CustomOp2 for Node {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.on_gpu()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let mut all = self.gradients(gradient)?;
        Ok((all.next().flatten(), all.next().flatten()))
    }
}
