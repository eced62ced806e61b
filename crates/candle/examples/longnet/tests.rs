//! A small training learns, and one that is killed at random moments ends where it would have.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use longspan_testing::Random;

use super::*;

/// What the process that is killed was told, a line an argument.
const TOLD: &str = "LONGNET_TOLD";

/// A directory that is gone when the test is over.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let place = std::env::temp_dir().join(format!("longnet-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        std::fs::create_dir_all(&place).unwrap();
        // A few words, over and over: there is something to learn.
        let words = ["one ", "two ", "three ", "four ", "longspan "];
        let text: String = (0..3_000_usize).map(|n| words[n * n % 7 % words.len()]).collect();
        std::fs::write(place.join("text"), text).unwrap();
        Place(place)
    }

    fn arguments(&self, run: &str, more: &[&str]) -> Vec<String> {
        let (directory, text) = (self.0.join(run), self.0.join("text"));
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        let fixed = "longnet --context 64 --batch 2 --hidden 16 --layers 2 --heads 2 --rate 1e-2 \
                     --warmup 5 --validation 512 --validate-every 10 --checkpoint-every 3";
        let mut arguments: Vec<String> = fixed.split_whitespace().map(str::to_owned).collect();
        arguments.extend(["--directory".to_owned(), path(&directory)]);
        arguments.extend(more.iter().map(|&argument| argument.to_owned()));
        arguments.push(path(&text));
        arguments
    }

    fn train(&self, run: &str, more: &[&str]) -> Result<()> {
        train(&Arguments::try_parse_from(self.arguments(run, more))?)
    }

    /// The same in a process of its own.
    fn spawn(&self, run: &str, more: &[&str]) -> Child {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new(this);
        command.args(["--exact", "tests::as_told", "--ignored"]);
        command.env(TOLD, self.arguments(run, more).join("\n"));
        command.stdout(Stdio::null()).spawn().unwrap()
    }

    /// Everything of the curve but its times.
    fn curve(&self, run: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.0.join(run).join("losses.csv")).unwrap();
        let line = |line: &str| line.rsplit_once(',').unwrap().0.to_owned();
        text.lines().map(line).collect()
    }

    /// Lines that are there by now.
    fn steps(&self, run: &str) -> usize {
        let text = std::fs::read_to_string(self.0.join(run).join("losses.csv"));
        text.map_or(0, |text| text.lines().count().saturating_sub(1))
    }

    fn file(&self, run: &str, name: impl AsRef<OsStr>) -> Vec<u8> {
        std::fs::read(self.0.join(run).join(name.as_ref())).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
#[ignore = "runs in a process that another test kills"]
fn as_told() -> Result<()> {
    let told = std::env::var(TOLD).context(TOLD)?;
    train(&Arguments::try_parse_from(told.lines())?)
}

#[test]
fn it_learns() -> Result<()> {
    let place = Place::new("learns");
    for attention in ["dilated", "dense", "window", "dilated-window"] {
        place.train(attention, &["--steps", "60", "--attention", attention])?;
        let curve = place.curve(attention);
        assert_eq!(curve.len(), 61);
        let bits =
            |line: &str, column| line.split(',').nth(column).unwrap().parse::<f64>().unwrap();
        let (first, last) = (bits(&curve[1], 2), bits(&curve[60], 2));
        // A guess costs eight bits; the text has five words and some thirteen letters.
        assert!((first - 8.0).abs() < 1.0 && last < 2.0, "{attention}: from {first} to {last}");
        let validation = bits(&curve[60], 3);
        assert!((validation - last).abs() < 1.0, "{attention}: {validation}, {last}");
    }
    Ok(())
}

/// Killed at random moments, again and again, a training ends with the curve and the weights of one
/// that wasn't, to the bit.
#[test]
fn killed_and_resumed() {
    let place = Place::new("killed");
    let more = ["--steps", "90"];
    assert!(place.spawn("whole", &more).wait().unwrap().success());

    // Moments that differ from run to run, and are told when something fails.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let mut stream = Random::new(now.as_nanos() as u64);
    let mut random = |limit: usize| stream.below(limit as u64) as usize;
    let (mut kills, mut moments) = (0, Vec::new());
    loop {
        // So many steps on, and then somewhere within one, or within what comes before the first.
        // Steps and not seconds: a machine may be busy for a while.
        let before = place.steps("killed");
        let (steps, pause) = (before + random(15), Duration::from_millis(random(40) as u64));
        moments.push((steps, pause));
        let mut child = place.spawn("killed", &more);
        while kills < 8 && place.steps("killed") < steps && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if kills < 8 {
            std::thread::sleep(pause);
            child.kill().unwrap();
        }
        let status = child.wait().unwrap();
        if status.code().is_some() {
            assert!(status.success(), "{status} after {moments:?}");
            break;
        }
        kills += 1;
    }
    assert!(kills > 0, "it was done before it could be killed: {moments:?}");
    assert_eq!(place.curve("killed"), place.curve("whole"), "{moments:?}");
    for name in ["checkpoint.safetensors", "model/model.safetensors"] {
        assert!(place.file("killed", name) == place.file("whole", name), "{name}: {moments:?}");
    }
}

/// The branches of a context of 16 k, and of four times as much: the near ones stay as they are.
#[test]
fn branches() -> Result<()> {
    let place = Place::new("branches");
    let rates_and_segments = |context: &str| -> Result<_> {
        let mut arguments = place.arguments("run", &["--steps", "1"]);
        let at = arguments.iter().position(|argument| argument == "--context").unwrap();
        arguments[at + 1] = context.to_owned();
        let heads = arguments.iter().position(|argument| argument == "--heads").unwrap();
        arguments[heads + 1] = "8".to_owned();
        let settings = Arguments::try_parse_from(arguments)?.settings;
        Ok(serde_json::to_value(settings.config()?.attention)?["dilated"].take())
    };
    let expected = serde_json::json!({
        "segment_lengths": [1024, 2048, 4096, 8192, 16384],
        "dilation_rates": [1, 2, 4, 8, 8],
    });
    assert_eq!(rates_and_segments("16384")?, expected);
    let expected = serde_json::json!({
        "segment_lengths": [1024, 2048, 4096, 8192, 16384, 32768, 65536],
        "dilation_rates": [1, 2, 4, 8, 8, 8, 8],
    });
    assert_eq!(rates_and_segments("65536")?, expected);
    let expected = serde_json::json!({
        "segment_lengths": [6, 12, 24, 48, 96, 100],
        "dilation_rates": [1, 2, 4, 8, 8, 8],
    });
    assert_eq!(rates_and_segments("100")?, expected);
    Ok(())
}

/// Another training in the same place is refused, and one that is done stays as it is.
#[test]
fn settings_stay() -> Result<()> {
    let place = Place::new("settings");
    place.train("run", &["--steps", "4"])?;
    let curve = place.curve("run");
    place.train("run", &["--steps", "4"])?;
    assert_eq!(place.curve("run"), curve);
    let refused = |more: &[&str], part: &str| {
        let message = format!("{:#}", place.train("run", more).unwrap_err());
        assert!(message.contains(part), "{message}");
    };
    refused(&["--steps", "5"], "steps = 4, asked for 5");
    refused(&["--steps", "4", "--seed", "2"], "seed = 1, asked for 2");
    refused(&["--steps", "4", "--window", "9"], "--window");
    refused(&["--steps", "4", "--attention", "dense", "--segments", "8", "--rates", "1"], "--segm");
    refused(&["--budget", "1.0"], "no step to take");
    std::fs::write(place.0.join("text"), "another text".repeat(999))?;
    refused(&["--steps", "4"], "text = ");
    Ok(())
}
