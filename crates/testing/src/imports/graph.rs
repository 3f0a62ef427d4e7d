//! The modules of one folder, and which of them imports which.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Who imports whom, with the first place that does.
#[derive(Default)]
pub(super) struct Graph(BTreeMap<String, BTreeMap<String, String>>);

impl Graph {
    pub fn add(&mut self, from: &str, to: &str, place: String) {
        self.0.entry(from.to_string()).or_default().entry(to.to_string()).or_insert(place);
    }

    /// A shortest circle through each module that is in one, each circle once.
    pub fn circles(&self) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let mut lines = Vec::new();
        for circle in self.0.keys().filter_map(|module| self.circle(module)) {
            if seen.insert(circle.iter().copied().collect::<BTreeSet<_>>()) {
                lines.push(self.line(&circle));
            }
        }
        lines
    }

    /// A shortest way from a module back to itself: its modules, the first one once.
    fn circle<'a>(&'a self, start: &'a str) -> Option<Vec<&'a str>> {
        let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut queue = VecDeque::from([start]);
        while let Some(module) = queue.pop_front() {
            for next in self.0.get(module).into_iter().flatten().map(|(next, _)| next.as_str()) {
                if next == start {
                    let before = |&module: &&'a str| came_from.get(module).copied();
                    let mut way: Vec<&str> = std::iter::successors(Some(module), before).collect();
                    way.reverse();
                    return Some(way);
                }
                if !came_from.contains_key(next) {
                    came_from.insert(next, module);
                    queue.push_back(next);
                }
            }
        }
        None
    }

    fn line(&self, circle: &[&str]) -> String {
        let mut line = circle[0].to_string();
        for (i, from) in circle.iter().enumerate() {
            let to = circle[(i + 1) % circle.len()];
            line += &format!(" -> {to} ({})", self.0[*from][to]);
        }
        line
    }
}
