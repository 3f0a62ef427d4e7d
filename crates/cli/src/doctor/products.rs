//! What becomes of the products that cuBLASLt may compute from codes.

use nvfp4_kernels::gemm::cuda::{ProductKind, Verdict};
use serde_json::{Value, json};

/// Each kind of products, and what becomes of it on a GPU.
pub struct Products(pub Vec<(ProductKind, Verdict)>);

/// The state of a kind in JSON, and why it is not used.
fn state(verdict: &Verdict) -> (&'static str, Option<&str>) {
    match verdict {
        Verdict::Used => ("used", None),
        Verdict::NotOnThisChip => ("not on this chip", None),
        Verdict::Refused(reason) => ("refused", Some(reason)),
        Verdict::Outside(reason) => ("outside its bound", Some(reason)),
    }
}

impl Products {
    /// One line; kinds with the same answer stand together.
    pub fn text(&self) -> String {
        let mut groups: Vec<(String, Vec<String>)> = Vec::new();
        for (kind, verdict) in &self.0 {
            let answer = match state(verdict) {
                (state, None) => state.to_string(),
                (state, Some(reason)) => format!("{state}, so another way ({reason})"),
            };
            match groups.iter_mut().find(|group| group.0 == answer) {
                Some(group) => group.1.push(kind.to_string()),
                None => groups.push((answer, vec![kind.to_string()])),
            }
        }
        let groups = groups.iter().map(|(answer, kinds)| format!("{}: {answer}", kinds.join(", ")));
        format!("cuBLASLt on codes: {}", groups.collect::<Vec<_>>().join("; "))
    }

    /// What is wrong: results outside their bound, which are not used.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        self.0.iter().filter_map(|(kind, verdict)| match verdict {
            Verdict::Outside(reason) => Some(format!("cuBLASLt on codes, {kind}: {reason}")),
            Verdict::Used | Verdict::NotOnThisChip | Verdict::Refused(_) => None,
        })
    }

    pub fn to_json(&self) -> Value {
        let one = |(kind, verdict): &(ProductKind, Verdict)| {
            let (state, reason) = state(verdict);
            json!({ "kind": kind.to_string(), "state": state, "reason": reason })
        };
        self.0.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_with_the_same_answer_stand_together() {
        let verdicts = [
            Verdict::Outside("output (0, 1) is 3".to_string()),
            Verdict::Refused("cuBLASLt 12.4".to_string()),
            Verdict::Refused("cuBLASLt 12.4".to_string()),
            Verdict::Used,
            Verdict::NotOnThisChip,
        ];
        let products = Products(ProductKind::ALL.into_iter().zip(verdicts).collect());
        assert_eq!(
            products.text(),
            "cuBLASLt on codes: nvfp4: outside its bound, so another way (output (0, 1) is 3); nvfp4 row-scaled, \
             mxfp8: refused, so another way (cuBLASLt 12.4); fp8 split: used; fp8 fast: not on this chip"
        );
        assert_eq!(products.problems().collect::<Vec<_>>(), ["cuBLASLt on codes, nvfp4: output (0, 1) is 3"]);
        let json = products.to_json();
        assert_eq!(json[0], json!({ "kind": "nvfp4", "state": "outside its bound", "reason": "output (0, 1) is 3" }));
        assert_eq!(json[3], json!({ "kind": "fp8 split", "state": "used", "reason": null }));
    }
}
