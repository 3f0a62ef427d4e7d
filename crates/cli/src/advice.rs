//! What to do about an error or a finding, in the words of the command line. The library knows no
//! flags.

use nvfp4::Precision;
use nvfp4_checkpoint::{Decoding, Error, Finding, Fix, Setting, Target};
use nvfp4_recipe::{Family, Problem};
use std::ffi::OsString;

/// The flag or command that helps a command of these words, where there is one.
pub fn advice(error: &Error, words: &[OsString]) -> Option<String> {
    // Both flags cannot be given: one starts over what the other continues.
    let resume = match words.iter().any(|word| word == "--force") {
        true => "--resume in place of --force",
        false => "--resume",
    };
    let text = match error {
        Error::WeightNotFinite { module, .. } => return Some(format!("--skip '{module}' leaves it as it is")),
        Error::WeightDoesNotFit { decoding: Decoding::All, precision: Precision::F16, .. } => {
            "--dtype bf16 or --dtype f32, with --force to start over"
        }
        Error::WeightDoesNotFit { decoding: Decoding::All, .. } => "--dtype f32, with --force to start over",
        Error::WeightDoesNotFit { .. } => "`nvfp4 dequant --dtype f32` decodes the source; --force starts over",
        Error::Interrupted if in_parts(words) => "run the same command again to continue",
        Error::MissingParts { missing, .. } => {
            let first = missing.first().map(ToString::to_string).unwrap_or_default();
            return Some(format!("the same command with --part {first} in place of --finish makes the first of them"));
        }
        Error::Interrupted => return Some(format!("run the same command with {resume} to continue")),
        Error::TargetExists { .. } => "--force replaces it",
        Error::Unfinished { .. } => "--resume continues it, --force starts over",
        Error::OtherRequest { .. } | Error::DamagedJournal { .. } | Error::SourceChanged { .. } => {
            "--force starts over"
        }
        Error::NotReadBack { error } if error.is_of_the_system() => {
            let first = advice(error, words).map_or(String::new(), |first| format!("{first}; "));
            return Some(format!("{first}{resume} continues"));
        }
        Error::NotReadBack { .. } => "--force starts over",
        Error::NothingToQuantize => "`nvfp4 plan` says why",
        Error::UnknownWeight { .. } => "`nvfp4 plan` lists the weights",
        Error::UnclearDialect { .. } => "say which with --from modelopt or --from comfyui",
        Error::Setting { setting, .. } => flag(*setting)?,
        // Too many open files, which a user can have more of.
        Error::File(nvfp4_files::Error::Io { source, .. }) if cfg!(unix) && source.raw_os_error() == Some(24) => {
            "`ulimit -n` raises the limit"
        }
        _ => return None,
    };
    Some(text.to_string())
}

/// Whether a command does a part of a conversion, or its end: those continue by themselves.
fn in_parts(words: &[OsString]) -> bool {
    let word =
        |word: &OsString| word.to_str().is_some_and(|w| w == "--finish" || w == "--part" || w.starts_with("--part="));
    words.iter().any(word)
}

fn flag(setting: Setting) -> Option<&'static str> {
    Some(match setting {
        Setting::Architectures => "--any-architecture converts it all the same",
        Setting::Acts => "--acts gives activation scales",
        Setting::Kv => "leave out --kv",
        Setting::Skip => "--skip NAME leaves a weight as it is",
        Setting::Rules => "--rules FILE.toml says which form each weight gets",
        Setting::Fuse => "--fuse off turns joining off",
        Setting::Differing => "leave out --fix-scales, or --fuse off",
        Setting::Profile => "leave out --profile, or choose another --scale",
        Setting::Statistics => {
            "--stats names the file; --scale imatrix, --scale local-hessian and --round gptq read it"
        }
        Setting::Target => "--to modelopt",
        _ => return None,
    })
}

/// The command that removes a finding.
pub fn fix(finding: &Finding) -> Option<String> {
    Some(match finding.fix? {
        Fix::Convert(target) => format!("nvfp4 convert --to {target}"),
        Fix::ConvertWithOneScale(Target::ModelOpt) => "nvfp4 convert --fix-scales".to_string(),
        Fix::ConvertWithOneScale(target) => format!("nvfp4 convert --fix-scales --to {target}"),
        Fix::Decode => "nvfp4 dequant gives plain numbers back".to_string(),
        _ => return None,
    })
}

/// The flag that helps with a recipe.
pub fn about_recipe(problem: &Problem) -> Option<String> {
    match problem {
        Problem::Device { family: Family::Custom(name), .. } => Some(format!("--custom {name} says that it runs")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_checkpoint::Portion;

    /// The library's own text names no flag, and the advice does.
    #[test]
    fn flags_are_named_here_and_not_in_the_library() {
        let path = std::path::PathBuf::from("out");
        let of = |setting| Error::Setting { setting, reason: String::new() };
        for (error, expected) in [
            (Error::Interrupted, "--resume"),
            (Error::TargetExists { path: path.clone() }, "--force"),
            (Error::Unfinished { path: path.clone() }, "--resume"),
            (Error::OtherRequest { path: path.clone() }, "--force"),
            (Error::SourceChanged { path: path.clone() }, "--force"),
            (Error::NothingToQuantize, "nvfp4 plan"),
            (Error::UnknownWeight { pattern: "x".into() }, "nvfp4 plan"),
            (Error::UnclearDialect { path }, "--from"),
            (Error::WeightNotFinite { module: "m".into(), row: 0, col: 0, value: f32::NAN }, "--skip 'm'"),
            (Error::MissingParts { path: "out.parts".into(), missing: Portion::all(2).collect() }, "--part 0/2"),
            (of(Setting::Acts), "--acts"),
            (of(Setting::Kv), "--kv"),
            (of(Setting::Target), "--to"),
        ] {
            let (text, advice) = (error.to_string(), advice(&error, &[]).unwrap());
            assert!(advice.contains(expected) && !text.contains("--") && !text.contains("nvfp4 "), "{text}: {advice}");
        }
        let forced = ["nvfp4", "convert", "a", "b", "--force"].map(OsString::from);
        let advice = advice(&Error::Interrupted, &forced).unwrap();
        assert_eq!(advice, "run the same command with --resume in place of --force to continue");
        for words in [&["--part", "0/2"][..], &["--part=0/2"], &["--finish"]] {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            assert_eq!(super::advice(&Error::Interrupted, &words).unwrap(), "run the same command again to continue");
        }
    }
}
