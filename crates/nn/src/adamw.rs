//! AdamW with moments that can be saved. candle's own has the same arithmetic, but does not show
//! its moments.

use candle_core::backprop::GradStore;
use candle_core::{Result, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use std::collections::BTreeMap;

/// AdamW, bit for bit as candle's.
#[derive(Clone, Debug)]
pub struct AdamW {
    pub(crate) moments: BTreeMap<String, Moments>,
    pub(crate) step: usize,
    config: ParamsAdamW,
}

/// A parameter and the averages of its gradients.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    parameter: Var,
    pub first: Var,
    pub second: Var,
}

impl AdamW {
    /// An optimizer of named parameters, as [`crate::Session::parameters`] gives them.
    pub fn new(parameters: BTreeMap<String, Var>, config: ParamsAdamW) -> Result<Self> {
        let moments = parameters.into_iter().map(|(name, parameter)| {
            let zeros = || Var::zeros(parameter.shape(), parameter.dtype(), parameter.device());
            Ok((name, Moments { first: zeros()?, second: zeros()?, parameter }))
        });
        Ok(AdamW { moments: moments.collect::<Result<_>>()?, step: 0, config })
    }

    /// The settings.
    pub fn config(&self) -> &ParamsAdamW {
        &self.config
    }
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    fn new(vars: Vec<Var>, config: ParamsAdamW) -> Result<Self> {
        let named = vars.into_iter().enumerate().map(|(i, var)| (format!("{i}"), var));
        AdamW::new(named.collect(), config)
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.step += 1;
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.config;
        let unbiased = |beta: f64| 1.0 / (1.0 - beta.powi(self.step as i32));
        for Moments { parameter, first, second } in self.moments.values() {
            let Some(gradient) = gradients.get(parameter) else { continue };
            let m = ((first.as_tensor() * beta1)? + (gradient * (1.0 - beta1))?)?;
            let v = ((second.as_tensor() * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
            let (m_hat, v_hat) = ((&m * unbiased(beta1))?, (&v * unbiased(beta2))?);
            let decayed = (parameter.as_tensor() * (1.0 - lr * weight_decay))?;
            let change = ((m_hat / (v_hat.sqrt()? + eps)?)? * lr)?;
            parameter.set(&(decayed - change)?)?;
            first.set(&m)?;
            second.set(&v)?;
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.config.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.config.lr = lr;
    }
}
