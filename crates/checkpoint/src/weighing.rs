//! Which weights are quantized by what their errors do to a layer's outputs, and what is known of
//! the layer's inputs.

use super::action::Action;
use super::moments::Moments;
use super::plan::{Item, Plan};
use super::settings::{Round, ScaleChoice, Settings};
use super::weight::Stored;
use crate::{Error, Result, Setting};
use nvfp4_kernels::gptq;
use nvfp4_kernels::weighted::Weighting;
use nvfp4_spec::BLOCK;
use nvfp4_spec::gptq::Factor;
use std::collections::BTreeMap;

/// What a conversion knows of the inputs of layers.
#[derive(Debug, Default)]
pub(super) struct Weighing {
    moments: Option<Moments>,
    /// Weights of which too little is known, and why: they are quantized as without statistics.
    pub plain: BTreeMap<String, String>,
    scale: ScaleChoice,
    round: Round,
}

/// What to do about experts that were calibrated together.
const APART: &str = "statistics do not tell their inputs apart: skip it, or choose its scales without statistics";

/// How the codes of some rows are found.
#[derive(Clone, Copy, Debug)]
pub(super) enum Codes<'f> {
    /// To nearest.
    Nearest,
    /// By GPTQ.
    Mended(&'f Factor),
    /// To nearest, because the matrix of their inputs has no factor.
    Unfactored,
}

/// Whether numbers of a weight become codes.
fn is_rounded(item: &Item<'_>) -> bool {
    item.action == Action::Quantize && !matches!(item.weight.stored, Stored::MxFp4 { .. })
}

impl Weighing {
    /// Checks that the file of statistics has what each weight needs.
    pub fn new(settings: &Settings, plan: &Plan<'_>) -> Result<Self> {
        let (scale, round) = (settings.scale, settings.round);
        let wrong = |reason: String| Err(Error::setting(Setting::Statistics, reason));
        let weighted = matches!(scale, ScaleChoice::Imatrix | ScaleChoice::LocalHessian);
        if let Round::Gptq { damping, .. } = round
            && !(damping.is_finite() && damping >= 0.0)
        {
            return wrong(format!("the damping of GPTQ is {damping}; use a number from 0 on, such as 0.01"));
        }
        let path = match &settings.statistics {
            None if !weighted && round == Round::Nearest => return Ok(Weighing::default()),
            None => {
                return wrong("statistics of activations decide about these weights, and none are given".to_string());
            }
            Some(_) if !weighted && round == Round::Nearest => {
                return wrong("statistics are given, and neither scales nor codes are chosen by them".to_string());
            }
            Some(path) => path,
        };
        let mut found = Weighing { moments: None, plain: BTreeMap::new(), scale, round };
        let moments = Moments::open(path)?;
        let file = path.display();
        if scale == ScaleChoice::LocalHessian
            && ![Moments::BLOCK_HESSIANS, Moments::HESSIAN].iter().any(|ending| moments.has_any(ending))
        {
            return wrong(format!("{file} has no Hessians; make it with `nvfp4 calibrate --hessian local`"));
        }
        if round != Round::Nearest && !moments.has_any(Moments::HESSIAN) {
            return wrong(format!("{file} has no whole Hessians; make it with `nvfp4 calibrate --hessian full`"));
        }
        for item in plan.items.iter().filter(|item| is_rounded(item)) {
            let (module, cols) = (&item.weight.module, item.weight.cols);
            if item.weight.matrices() > 1 || item.weight.is_transposed() {
                return wrong(format!("'{module}' holds several experts; {APART}"));
            }
            if moments.is_unseen(module)? {
                found.plain.insert(module.clone(), "no token reached it".to_string());
                continue;
            }
            let together = |parent| moments.has(&format!("{parent}.experts.down_proj"), Moments::MEAN_SQUARES);
            if item.experts().is_some_and(together) {
                return wrong(format!("'{module}' lay in one tensor with other experts when {file} was made; {APART}"));
            }
            moments.check(module, Moments::MEAN_SQUARES, &[cols])?;
            let whole = moments.has(module, Moments::HESSIAN);
            if scale == ScaleChoice::LocalHessian && !whole {
                moments.check(module, Moments::BLOCK_HESSIANS, &[cols / BLOCK, BLOCK, BLOCK])?;
            }
            if whole && (round != Round::Nearest || scale == ScaleChoice::LocalHessian) {
                moments.check(module, Moments::HESSIAN, &[cols, cols])?;
            } else if round != Round::Nearest {
                found.plain.insert(module.clone(), format!("no Hessian of its {cols} columns was kept"));
                continue;
            }
            let needed = gptq::bytes(cols as u64);
            if round != Round::Nearest && needed > settings.memory / 3 * 2 {
                let megabytes = needed.div_ceil(1_000_000) * 3 / 2;
                return wrong(format!(
                    "GPTQ of '{module}', with {cols} columns, needs a limit of {megabytes} MB of memory; raise it, or \
                     skip the weight"
                ));
            }
        }
        found.moments = Some(moments);
        Ok(found)
    }

    fn known(&self, item: &Item<'_>) -> Result<Option<&Moments>> {
        match &self.moments {
            Some(moments) if is_rounded(item) && !moments.is_unseen(&item.weight.module)? => Ok(Some(moments)),
            _ => Ok(None),
        }
    }

    /// What the scales of a weight are chosen by beside its numbers.
    pub fn weighting<'m>(&self, item: &Item<'_>, numbers: &'m mut Vec<f32>) -> Result<Option<Weighting<'m>>> {
        let (module, cols) = (&item.weight.module, item.weight.cols);
        let Some(moments) = self.known(item)? else { return Ok(None) };
        match self.scale {
            ScaleChoice::Imatrix => *numbers = moments.mean_squares(module, cols)?,
            ScaleChoice::LocalHessian => *numbers = moments.block_hessians(module, cols)?,
            _ => return Ok(None),
        }
        Ok(Some(match self.scale {
            ScaleChoice::Imatrix => Weighting::Columns(numbers),
            _ => Weighting::Hessians(numbers),
        }))
    }

    /// The module whose Hessian decides about the codes of a weight; none where they are nearest.
    pub fn hessian_of<'m>(&'m self, item: &'m Item<'_>) -> Option<&'m str> {
        let moments = self.moments.as_ref().filter(|_| self.round != Round::Nearest && is_rounded(item))?;
        let module = &item.weight.module;
        (!self.plain.contains_key(module)).then(|| moments.owner(module))
    }

    /// The factor of the Hessian of a module's inputs; none where it has none.
    pub fn factor(&self, module: &str, cols: usize) -> Result<Option<Factor>> {
        match (&self.moments, self.round) {
            (Some(moments), Round::Gptq { order, damping }) => {
                Ok(gptq::factor(moments.hessian(module, cols)?, cols, damping, order)?)
            }
            _ => Ok(None),
        }
    }
}
