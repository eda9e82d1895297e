//! Images through the whole engine, with a toy decoder and a toy tower. A KV slot of the toy holds what its row was computed of:
//! token or embedding, angles, and what a two-way row saw; logits are a function of all slots, read back through the page tables.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{Engine, RequestId};
use crate::request::{
    EngineSessionName, Event, Finish, ImageDifference, ImageUsage, Limits, Outcome, PromptImage, Request,
    ReuseReason, Started,
};
use crate::spec::{EngineConfig, Speculation};
use llmctl_base::error::{Error, Result};
use llmctl_image::{ImageFile, ImageHash, ImageInfo, Patches, Picture, PixelRule, ResizeFilter, SizeRule};
use llmctl_models::images::{
    ImageKey, ImageRows, ImageSpan, ImageText, RowRule, TextForm, TwoWay, VisionSpec,
};
use llmctl_models::kv::disk::{DEFAULT_QUEUE_BYTES, DiskConfig, DiskStore};
use llmctl_models::kv::{KvGroup, KvKind, PAGE_TOKENS, PageRef, TokenBuf};
use llmctl_models::model::{Batch, Logits, Model, ModelSpec, Row};
use llmctl_models::tensor::SharedBytes;
use llmctl_models::text::Vocabulary;
use llmctl_models::vision::{Tower, TowerJob};

const VOCAB: usize = 64;
/// Not in the vocabulary, as Gemma 3's.
const PLACEHOLDER: u32 = 70;
const WAIT: Duration = Duration::from_secs(60);

fn mix(a: u64, b: u64) -> u64 {
    (a ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15)).rotate_left(29).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// Rows of every step.
type Steps = Arc<Mutex<Vec<Vec<Row>>>>;

struct ToyModel {
    spec: ModelSpec,
    slots: HashMap<PageRef, [u64; PAGE_TOKENS]>,
    steps: Steps,
}

impl ToyModel {
    fn contents(batch: &Batch<'_>) -> Vec<u64> {
        let content = |(index, row): (usize, &Row)| {
            let image = batch.images.iter().find(|image| image.rows.contains(&index));
            assert_eq!(image.is_some(), row.token == PLACEHOLDER, "images have rows, and no others");
            let start = match image {
                None => u64::from(row.token),
                Some(image) => {
                    let at = (image.first + index - image.rows.start) * image.embeddings.width;
                    let row = &image.embeddings.embeddings[at..][..image.embeddings.width];
                    row.iter().fold(1, |hash, value| mix(hash, value.to_bits().into()))
                }
            };
            row.angles.iter().fold(start, |hash, angle| mix(hash, u64::from(*angle)))
        };
        batch.rows.iter().enumerate().map(content).collect()
    }

    fn logits(&self, batch: &Batch<'_>, row: &Row) -> Vec<f32> {
        let table = batch.tables[row.sequence];
        let history = (0..=row.position).fold(7, |hash, position| {
            let (page, offset) = table.slot(0, position);
            mix(hash, self.slots[&PageRef { group: 0, page }][offset])
        });
        (0..VOCAB as u64).map(|id| (mix(history, id) % 10_000) as f32 / 500.0).collect()
    }
}

impl Model for ToyModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits> {
        self.steps.lock().expect("no panic").push(batch.rows.to_vec());
        let contents = Self::contents(batch);
        for (index, row) in batch.rows.iter().enumerate() {
            let seen = (1..row.visible - row.position).fold(contents[index], |hash, ahead| {
                let other = batch.rows[index + ahead];
                assert_eq!((other.sequence, other.position), (row.sequence, row.position + ahead), "whole");
                mix(hash, contents[index + ahead])
            });
            let (page, offset) = batch.tables[row.sequence].slot(0, row.position);
            self.slots.entry(PageRef { group: 0, page }).or_default()[offset] = seen;
        }
        let wanted = batch.rows.iter().filter(|row| row.wants_logits);
        let values = wanted.flat_map(|row| self.logits(batch, row)).collect();
        Ok(Logits { values, vocab_size: VOCAB })
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<()> {
        let page = self.slots[&from];
        self.slots.insert(to, page);
        Ok(())
    }

    fn free_page(&mut self, page_ref: PageRef) {
        self.slots.remove(&page_ref);
    }

    fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<()> {
        out.extend(self.slots[&page_ref].iter().flat_map(|slot| slot.to_le_bytes()));
        Ok(())
    }

    fn import_page(&mut self, page_ref: PageRef, bytes: SharedBytes) -> Result<()> {
        let slots: Vec<u64> = bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let page = slots.try_into().map_err(|_| Error::Backend("a page of another size".to_owned()))?;
        self.slots.insert(page_ref, page);
        Ok(())
    }
}

struct ToyTower {
    spec: VisionSpec,
    num_begun: Arc<AtomicUsize>,
}

struct ToyJob {
    tiles: Vec<Patches>,
    slices: usize,
}

const SLICES: usize = 3;

impl Tower for ToyTower {
    fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    fn begin(&self, tiles: Vec<Patches>) -> Result<Box<dyn TowerJob>> {
        self.num_begun.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(ToyJob { tiles, slices: 0 }))
    }
}

impl TowerJob for ToyJob {
    fn advance(&mut self) -> Result<Option<ImageRows>> {
        self.slices += 1;
        let patches = self.tiles.iter().flat_map(|tile| tile.values.chunks_exact(3 * 2 * 2));
        let embeddings = patches.flat_map(|patch| [patch.iter().sum(), patch[0] - patch[11]]).collect();
        let rows = ImageRows { width: 2, embeddings, deep: Vec::new() };
        Ok((self.slices == SLICES).then_some(rows))
    }

    fn progress(&self) -> (usize, usize) {
        (self.slices, SLICES)
    }
}

struct Letters;

impl Vocabulary for Letters {
    fn token_bytes(&self, _: u32) -> Option<Cow<'_, [u8]>> {
        Some(b"a".into())
    }

    fn is_special(&self, _: u32) -> bool {
        false
    }
}

/// A kind of family.
#[derive(Clone, Copy)]
struct Family(RowRule);

const CAUSAL: Family = Family(RowRule { two_way: TwoWay::Never, mrope: true });
const TWO_WAY: Family = Family(RowRule { two_way: TwoWay::All, mrope: false });

fn vision(family: Family) -> VisionSpec {
    let size = SizeRule::Area { least_pixels: 1, most_pixels: 1 << 20, frames: 1, enlarges: false };
    VisionSpec {
        tower: "toy".to_owned(),
        fingerprint: "toy-1".to_owned(),
        pixels: PixelRule {
            filter: ResizeFilter::Bicubic,
            patch: 2,
            merge: 1,
            mean: [0.0; 3],
            std: [1.0; 3],
            size,
            least_tokens: None,
            most_tokens: None,
        },
        rows: family.0,
        placeholder: PLACEHOLDER,
        text: ImageText {
            printed: "<image>".to_owned(),
            placeholder: "<image>".to_owned(),
            form: TextForm::Run { before: String::new(), after: String::new() },
        },
    }
}

/// An engine with its steps and the number of images that its tower has begun.
struct Rig {
    engine: Engine,
    steps: Steps,
    num_begun: Arc<AtomicUsize>,
}

fn rig(family: Family, change: impl FnOnce(&mut EngineConfig)) -> Rig {
    let mut config = EngineConfig { max_running: 4, max_sessions: 4, ..EngineConfig::new(512, Vec::new()) };
    change(&mut config);
    let page_bytes = size_of::<[u64; PAGE_TOKENS]>();
    let spec = ModelSpec {
        architecture: "toy".to_owned(),
        vocab_size: VOCAB,
        context_length: 512,
        groups: vec![KvGroup { kind: KvKind::Full, page_bytes }],
        can_rewind: true,
        adapters: Vec::new(),
    };
    let steps = Steps::default();
    let model = ToyModel { spec, slots: HashMap::new(), steps: Arc::clone(&steps) };
    let mut engine = Engine::new(Box::new(model), Arc::new(Letters), config).expect("valid");
    let num_begun = Arc::new(AtomicUsize::new(0));
    engine.set_tower(Box::new(ToyTower { spec: vision(family), num_begun: Arc::clone(&num_begun) }));
    Rig { engine, steps, num_begun }
}

fn image(seed: u8, width: u32, height: u32) -> Arc<ImageFile> {
    let rgb = (0..width * height * 3).map(|n| (n as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    let info = ImageInfo { media_type: "image/png", width, height };
    let picture = Picture { width, height, rgb };
    Arc::new(ImageFile { hash: ImageHash([seed; 32]), bytes: Vec::new().into(), info, picture })
}

enum Part<'a> {
    /// So many tokens from this one on.
    Text(u32, usize),
    Image(&'a Arc<ImageFile>),
}
use Part::{Image, Text};

fn request(family: Family, parts: &[Part<'_>]) -> Request {
    let mut request =
        Request { limits: Limits { max_tokens: Some(8), ..Limits::default() }, ..Request::default() };
    for part in parts {
        let start = request.prompt.len();
        match part {
            Text(first, count) => request.prompt.extend((0..*count as u32).map(|n| (first + n) % 60)),
            Image(file) => {
                let grid = [file.picture.height / 2, file.picture.width / 2];
                request.prompt.extend(vec![PLACEHOLDER; (grid[0] * grid[1]) as usize]);
                let key = ImageKey::of(&file.picture, &vision(family));
                let spans = vec![ImageSpan { rows: start..request.prompt.len(), key, first: 0, grid }];
                request.images.push(PromptImage { file: Arc::clone(file), key, spans });
            }
        }
    }
    request
}

fn named(name: &str) -> EngineSessionName {
    EngineSessionName::parse(name).expect("a name")
}

fn in_session(request: Request, name: &str) -> Request {
    Request { session: Some(named(name)), ..request }
}

/// The result of a request.
#[derive(Debug)]
struct Answer {
    ids: Vec<u32>,
    started: Option<Started>,
    outcome: Outcome,
    slices: Vec<(usize, usize)>,
    num_scored: usize,
}

impl Answer {
    fn images(&self) -> ImageUsage {
        self.outcome.usage.images
    }

    fn cached(&self) -> usize {
        self.outcome.usage.cached_tokens
    }
}

/// Runs until all requests have ended.
fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Answer> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.submit(request).expect("valid")).collect();
    let mut events = Vec::new();
    for _ in 0..10_000 {
        events.extend(engine.step());
        if engine.is_idle() {
            return ids.into_iter().map(|id| collect(id, &events)).collect();
        }
    }
    panic!("it never ends");
}

fn collect(id: RequestId, events: &[(RequestId, Event)]) -> Answer {
    let (mut ids, mut started, mut outcome) = (Vec::new(), None, None);
    let (mut slices, mut num_scored) = (Vec::new(), 0);
    for (_, event) in events.iter().filter(|(of, _)| *of == id) {
        match event {
            Event::Started(event) => started = Some(event.clone()),
            Event::Encoding { done, total } => slices.push((*done, *total)),
            Event::Prompt { logprobs } => num_scored += logprobs.len(),
            Event::Text { tokens, .. } => ids.extend(tokens.iter().map(|token| token.id)),
            Event::Done(event) => outcome = Some(event.clone()),
            Event::Failed(error) => panic!("{error}"),
            Event::Queued { .. } | Event::Prefill { .. } => {}
        }
    }
    Answer { ids, started, outcome: outcome.expect("an end"), slices, num_scored }
}

fn answer(engine: &mut Engine, request: Request) -> Answer {
    run(engine, vec![request]).pop().expect("one")
}

/// Returns the ids that a new engine answers with.
fn cold(family: Family, request: &Request) -> Vec<u32> {
    answer(&mut rig(family, |_| {}).engine, request.clone()).ids
}

fn disk(root: &Path) -> DiskStore {
    let config = DiskConfig {
        root: root.to_owned(),
        limit_bytes: 1 << 20,
        fingerprint: "toy".to_owned(),
        description: "toy".into(),
        queue_bytes: DEFAULT_QUEUE_BYTES,
        vault: None,
    };
    DiskStore::open(config).expect("a store")
}

#[test]
fn every_way_through_the_engine_gives_the_same_answer() {
    let (first, second) = (image(1, 14, 10), image(2, 8, 20));
    for family in [CAUSAL, TWO_WAY] {
        let asked = request(family, &[Text(1, 20), Image(&first), Text(5, 9), Image(&second), Text(9, 40)]);
        let expected = cold(family, &asked);
        assert_eq!(expected.len(), 8);
        for step_tokens in [1, 7, 33] {
            let mut rig = rig(family, |config| config.step_tokens = step_tokens);
            assert_eq!(answer(&mut rig.engine, asked.clone()).ids, expected, "{step_tokens} to a step");
        }
        let mut rig = rig(family, |config| config.speculation = Speculation::Always(4));
        let cold = answer(&mut rig.engine, asked.clone());
        let warm = answer(&mut rig.engine, asked.clone());
        assert_eq!((&cold.ids, &warm.ids), (&expected, &expected));
        assert_eq!(
            (cold.images(), warm.images()),
            (ImageUsage { encoded: 2, found: 0 }, ImageUsage::default())
        );
        assert!(warm.cached() >= 128 && rig.num_begun.load(Ordering::SeqCst) == 2, "{}", warm.cached());
        let total = 2 * SLICES;
        assert!(cold.slices.iter().all(|(done, all)| *all == total && done <= all), "{:?}", cold.slices);
        assert!(cold.slices.is_sorted() && cold.slices.contains(&(total, total)), "{:?}", cold.slices);
    }
}

#[test]
fn requests_side_by_side_share_one_encoding() {
    let (shared, own) = (image(1, 14, 10), image(2, 8, 8));
    for family in [CAUSAL, TWO_WAY] {
        let both = [
            request(family, &[Text(1, 40), Image(&shared), Text(9, 4)]),
            request(family, &[Text(3, 11), Image(&own), Image(&shared), Text(9, 4)]),
            request(family, &[Text(7, 50)]),
        ];
        let mut rig = rig(family, |config| config.step_tokens = 16);
        let answers = run(&mut rig.engine, both.to_vec());
        for (answer, request) in answers.iter().zip(&both) {
            assert_eq!(answer.ids, cold(family, request));
        }
        assert_eq!(rig.num_begun.load(Ordering::SeqCst), 2, "each image once");
    }
}

#[test]
fn a_prompt_with_other_images_never_takes_rows_of_the_old_ones() {
    let (first, second) = (image(1, 12, 12), image(2, 12, 12));
    let mut pixel = (*first).clone();
    pixel.picture.rgb[100] ^= 1;
    let pixel = Arc::new(pixel);
    let (a, b) = (|| Image(&first), || Image(&second));
    for family in [CAUSAL, TWO_WAY] {
        let known = request(family, &[Text(1, 40), a(), Text(5, 3), b(), Text(9, 4)]);
        let difference = |parts: &[Part<'_>]| {
            let mut rig = rig(family, |_| {});
            answer(&mut rig.engine, in_session(known.clone(), "s"));
            let asked = request(family, parts);
            let told = answer(&mut rig.engine, in_session(asked.clone(), "s"));
            assert_eq!(told.ids, cold(family, &asked));
            let difference = told.started.expect("started").difference.expect("they differ");
            (
                difference.position,
                difference.image.map(|ImageDifference { index, in_prompt, .. }| (index, in_prompt)),
            )
        };
        assert_eq!(
            difference(&[Text(1, 40), b(), Text(5, 3), a(), Text(9, 4)]),
            (40, Some((0, true))),
            "swapped"
        );
        assert_eq!(
            difference(&[Text(1, 40), a(), Text(5, 3), a(), Text(9, 4)]),
            (79, Some((1, true))),
            "twice"
        );
        let changed = [Text(1, 40), a(), Text(5, 3), Image(&pixel), Text(9, 4)];
        assert_eq!(difference(&changed), (79, Some((1, true))), "one image is another");
        let changed = [Text(1, 40), Image(&pixel), Text(5, 3), b(), Text(9, 4)];
        assert_eq!(difference(&changed), (40, Some((0, true))), "a pixel is another");
        assert_eq!(difference(&[Text(1, 41), a(), Text(5, 3), b(), Text(9, 4)]).0, 40, "moved by a token");
        assert_eq!(
            difference(&[Text(1, 40), Text(5, 3), b(), Text(9, 4)]),
            (40, Some((0, false))),
            "dropped"
        );
        let edited = [Text(1, 20), Text(0, 1), Text(22, 19), a(), Text(5, 3), b(), Text(9, 4)];
        assert_eq!(difference(&edited), (20, None), "the text before");
    }
}

#[test]
fn rows_come_back_from_disk_and_damage_is_encoded_again() {
    let seen = image(1, 14, 10);
    for family in [CAUSAL, TWO_WAY] {
        let root = tempfile::tempdir().expect("a folder");
        let first = request(family, &[Text(1, 70), Image(&seen), Text(9, 30)]);
        let start = || {
            let mut rig = rig(family, |_| {});
            rig.engine.set_disk(disk(root.path()));
            rig
        };
        let expected = {
            let mut rig = start();
            let told = answer(&mut rig.engine, in_session(first.clone(), "s"));
            assert!(rig.engine.flush_disk(WAIT));
            told.ids
        };
        let mut rig = start();
        let tokens = TokenBuf { ids: first.prompt.clone(), images: first.spans(), ..TokenBuf::default() };
        rig.engine.restore_session(&named("s"), tokens).expect("new");
        let told = answer(&mut rig.engine, in_session(first.clone(), "s"));
        assert_eq!((&told.ids, told.images()), (&expected, ImageUsage::default()), "its KV is on disk");
        let reuse = told.started.expect("started").reuse;
        assert_eq!((reuse.reason, reuse.first_difference), (ReuseReason::Restored, None));
        assert!(reuse.cached_tokens >= 128);

        let edited = request(family, &[Text(2, 70), Image(&seen), Text(9, 30)]);
        let expected = cold(family, &edited);
        let told = answer(&mut start().engine, edited.clone());
        assert_eq!((told.images(), told.ids), (ImageUsage { encoded: 0, found: 1 }, expected.clone()));
        let path = root.path().join("images").join(first.images[0].key.to_string());
        let mut bytes = std::fs::read(&path).expect("written");
        bytes[99] ^= 4;
        std::fs::write(&path, bytes).expect("written");
        let told = answer(&mut start().engine, edited);
        assert_eq!((told.images(), told.ids), (ImageUsage { encoded: 1, found: 0 }, expected));
    }
}

#[test]
fn a_cancelled_request_ends_its_encoding_and_the_next_one_is_answered() {
    let seen = image(1, 14, 10);
    let asked = request(CAUSAL, &[Text(1, 10), Image(&seen), Text(9, 4)]);
    let mut rig = rig(CAUSAL, |_| {});
    let id = rig.engine.submit(asked.clone()).expect("valid");
    for _ in 0..2 {
        rig.engine.step();
    }
    assert!(rig.engine.cancel(id));
    let events = rig.engine.step();
    assert!(
        matches!(&events[..], [(_, Event::Done(outcome))] if outcome.finish == Finish::Cancelled),
        "{events:?}"
    );
    assert!(rig.engine.is_idle() && rig.num_begun.load(Ordering::SeqCst) == 1);
    assert_eq!(answer(&mut rig.engine, asked.clone()).ids, cold(CAUSAL, &asked));
    assert_eq!(rig.num_begun.load(Ordering::SeqCst), 2, "its job was dropped");
}

#[test]
fn images_are_whole_in_a_step_and_others_decode_meanwhile() {
    let seen = image(1, 20, 12); // 60 rows
    let mut rig = rig(TWO_WAY, |config| config.step_tokens = 8);
    let mut talking = request(TWO_WAY, &[Text(3, 5)]);
    talking.limits.max_tokens = Some(60);
    rig.engine.submit(talking).expect("valid");
    (0..2).for_each(|_| drop(rig.engine.step()));
    rig.steps.lock().expect("no panic").clear();
    let asked = request(TWO_WAY, &[Text(1, 10), Image(&seen), Image(&seen), Text(9, 4)]);
    rig.engine.submit(asked).expect("valid");
    while !rig.engine.is_idle() {
        rig.engine.step();
    }
    let steps = rig.steps.lock().expect("no panic");
    let longest: Vec<usize> = steps.iter().map(Vec::len).filter(|len| *len > 8).collect();
    assert_eq!(longest, [61, 61], "an image and the row of the other request");
    let decoding = steps.iter().filter(|rows| rows.iter().any(|row| row.sequence == 0 && row.wants_logits));
    assert!(decoding.count() >= 50, "no step left it out");
}

#[test]
fn images_that_do_not_fit_the_prompt_are_refused_by_name() {
    let seen = image(1, 14, 10);
    let good = request(CAUSAL, &[Text(1, 10), Image(&seen), Text(9, 4)]);
    let mut rig = rig(CAUSAL, |_| {});
    let mut check = |change: &dyn Fn(&mut Request), reason: &str| {
        let mut request = good.clone();
        change(&mut request);
        match rig.engine.submit(request) {
            Err(Error::InvalidParameter { name: "images", message }) => {
                assert!(message.contains(reason), "{message}")
            }
            other => panic!("{reason}: {other:?}"),
        }
    };
    check(&|request| request.images.clear(), "token 10 stands for an image");
    check(&|request| request.prompt[12] = 3, "image 1: its rows 10..45 are not placeholders");
    check(&|request| request.images[0].spans[0].rows = 10..500, "not placeholders");
    check(&|request| request.images[0].spans[0].grid = [7, 7], "7 x 7");
    check(&|request| request.images[0].spans[0].first = 1, "of its embeddings");
    check(&|request| request.images[0].file = image(1, 14, 12), "35 rows, but 42 embeddings");
    check(&|request| request.images.push(request.images[0].clone()), "image 2");
    let blind = Engine::new(
        Box::new(ToyModel {
            spec: rig.engine.spec().model.clone(),
            slots: HashMap::new(),
            steps: Steps::default(),
        }),
        Arc::new(Letters),
        EngineConfig::new(512, Vec::new()),
    );
    let refused = blind.expect("valid").submit(good);
    assert!(matches!(refused, Err(Error::InvalidParameter { name: "images", .. })), "{refused:?}");
}

#[test]
fn log_probabilities_leave_rows_of_images_out() {
    let seen = image(1, 14, 10);
    for family in [CAUSAL, TWO_WAY] {
        let parts = [Text(1, 10), Image(&seen), Text(9, 24)];
        let asked = Request { prompt_logprobs: Some(1), ..request(family, &parts) };
        let told = answer(&mut rig(family, |_| {}).engine, asked.clone());
        assert_eq!(
            (told.num_scored, told.ids),
            (asked.prompt.len() - 1, cold(family, &request(family, &parts)))
        );
    }
}
