//! The list of commands in `nvfp4 --help`, in groups; clap has one list only.

use std::fmt::Write;

/// The groups, in the order in which people need them.
const GROUPS: [(&str, &[&str]); 6] = [
    ("Convert", &["convert", "plan", "verify", "inspect", "diff", "dequant"]),
    ("Run", &["eval", "calibrate", "generate"]),
    ("Recipes", &["recipe", "train"]),
    ("This machine", &["doctor", "bench", "tune"]),
    ("For developers", &["modes", "agreement", "conformance"]),
    ("Other", &["demo", "completions", "help"]),
];

/// The same command line with its commands listed in groups.
pub fn grouped(command: clap::Command) -> clap::Command {
    let mut list = String::new();
    for (title, names) in GROUPS {
        let _ = writeln!(list, "{title}:");
        for name in names {
            let about = match command.find_subcommand(name) {
                Some(found) => found.get_about().map(ToString::to_string).unwrap_or_default(),
                None if *name == "help" => "Show the help of a command".to_string(),
                None => continue,
            };
            let _ = writeln!(list, "  {name:<12} {about}");
        }
        list.push('\n');
    }
    // The template is clap's own, with the groups in place of its list.
    command
        .help_template(format!("{{about}}\n\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_command_is_in_one_group_and_fits_a_line() {
        let command = crate::Cli::command();
        let listed = || GROUPS.iter().flat_map(|(_, names)| names.iter());
        for own in command.get_subcommands() {
            let count = listed().filter(|name| **name == own.get_name()).count();
            assert_eq!(count, 1, "{}", own.get_name());
            let about = own.get_about().unwrap().to_string();
            assert!(about.chars().count() <= 110, "{}: {about}", own.get_name());
        }
    }
}
