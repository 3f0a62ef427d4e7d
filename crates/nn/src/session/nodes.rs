//! Nodes of candle's graph, and what they keep for the backward pass.

use super::Session;
use crate::graph::{self, Backward};
use crate::{Error, Result};
use candle_core::Tensor;
use nvfp4_recipe::ModulePath;
use std::collections::BTreeMap;
use std::sync::Arc;

impl Session {
    /// Bytes that modules keep for backward passes at this moment, beside what candle's graph keeps
    /// ([`crate::graph_bytes`]).
    pub fn kept_bytes(&self) -> usize {
        self.state().kept.values().sum()
    }

    /// The same by module.
    pub fn kept_by_module(&self) -> BTreeMap<ModulePath, usize> {
        self.state().kept.clone()
    }

    /// Puts a module's result into candle's graph, unless nothing follows.
    pub(crate) fn attach(
        &self,
        module: (&'static str, &ModulePath),
        arguments: &[&Tensor],
        result: Tensor,
        kept: usize,
        backward: Backward,
    ) -> Result<Tensor> {
        let (name, path) = module;
        self.look(path, "output", &result)?;
        if self.is_evaluating() || !arguments.iter().any(|x| x.track_op()) {
            return Ok(result);
        }
        let ticket = Ticket::new(self, path, kept);
        let (session, path, forward, plan) = (self.clone(), path.clone(), self.step(), self.planned()?);
        let backward: Backward = Box::new(move |gradient| {
            let _kept = &ticket;
            let (step, current) = (session.step(), session.planned()?);
            if step != forward {
                return Err(Error::StepOver { module: path.to_string(), forward, now: step });
            }
            if !Arc::ptr_eq(&plan, &current) && *plan != *current {
                let (forward, now) = (plan.recipe().to_string(), current.recipe().to_string());
                return Err(Error::RecipeOver { module: path.to_string(), forward, now });
            }
            backward(gradient)
        });
        graph::attach(name, arguments, result, backward)
    }
}

/// Bytes that a node keeps, for as long as it lives.
struct Ticket {
    session: Session,
    path: ModulePath,
    bytes: usize,
}

impl Ticket {
    fn new(session: &Session, path: &ModulePath, bytes: usize) -> Self {
        *session.state().kept.entry(path.clone()).or_default() += bytes;
        Ticket { session: session.clone(), path: path.clone(), bytes }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.session.state();
        if let Some(kept) = state.kept.get_mut(&self.path) {
            *kept -= self.bytes;
        }
    }
}
