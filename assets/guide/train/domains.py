"""Tools of daily life for the tool-call documents: name words | description | parameters | requests.

A parameter is `name:kind`; the kinds are those of `values.py`. Requests name every parameter that they give."""

DOMAINS = """
get weather|Get the current weather of a city|city:place|what's the weather in {city}?|weather {city}|is it raining in {city} right now|how warm is it in {city}?|do I need an umbrella in {city}
weather forecast|Forecast for the next days|location:place days:small|give me the forecast for {location} for {days} days|how will the weather be in {location} over the next {days} days?|{days} day forecast {location}
book table|Reserve a table at a restaurant|restaurant:name guests:small|book a table at {restaurant} for {guests}|we are {guests}, get us a table at {restaurant}|reserve {restaurant} for {guests} people
send email|Send an email|to:email subject:phrase|send an email to {to} about {subject}|mail {to} with the subject {subject}|write to {to}, subject {subject}
send message|Send a text message to a contact|contact:person text:phrase|tell {contact} {text}|text {contact}: {text}|send {contact} the message {text}
set alarm|Set an alarm|time:time|wake me at {time}|set an alarm for {time}|alarm at {time} please|I have to get up at {time}
start countdown|Start a countdown|seconds:int|count down from {seconds} seconds|start a countdown of {seconds} seconds
add reminder|Remember something for the user|text:phrase date:date|remind me of {text} on {date}|on {date} remind me: {text}|add a reminder for {date}: {text}
play song|Play a song|title:phrase artist:person|play {title} by {artist}|put on {title} from {artist}|I want to hear {title} by {artist}
search flights|Find flights between two cities|origin:place destination:place date:date|flights from {origin} to {destination} on {date}|I want to fly from {origin} to {destination} on {date}|find me a plane from {origin} to {destination}, {date}
train times|Departures of trains|from:place to:place|when does the next train from {from} to {to} leave?|trains {from} to {to}|I have to go from {from} to {to} by train
convert currency|Convert money between currencies|amount:number from:currency to:currency|how much is {amount} {from} in {to}?|convert {amount} {from} to {to}|change {amount} {from} into {to}
translate text|Translate a text|text:phrase language:language|translate "{text}" into {language}|how do you say {text} in {language}|what is {text} in {language}?
turn on light|Turn on a light|room:room|turn on the light in the {room}|light on in the {room}|it is dark in the {room}
set temperature|Set the heating of a room|room:room degrees:small|set the {room} to {degrees} degrees|heat the {room} to {degrees}|make the {room} {degrees} degrees warm
open door|Open a door|door:thing|open the {door} door|let me in through the {door} door
lock vehicle|Lock a vehicle|plate:code|lock the vehicle {plate}|please lock {plate}
order pizza|Order a pizza|kind:thing size:enum small,medium,large|order a {size} {kind} pizza|I'd like a {kind} pizza, {size}|one {size} pizza {kind} please
track parcel|Where a parcel is|number:code|where is my parcel {number}?|track {number}|has {number} been delivered yet
stock price|Price of a share|symbol:ticker|what is {symbol} trading at?|price of {symbol}|how is {symbol} doing today
get news|Latest news about a topic|topic:thing count:small|show me {count} news about {topic}|{count} headlines on {topic}|what is new about {topic}? give me {count}
find recipe book|Search recipes|dish:thing|how do I cook {dish}?|a recipe for {dish}|I want to make {dish}
create event|Put an event into the calendar|title:phrase date:date time:time|put {title} on {date} at {time} into my calendar|schedule {title} for {date}, {time}|new event {title} on {date} at {time}
cancel event|Cancel an event|title:phrase|cancel {title}|remove {title} from my calendar|{title} does not take place
add contact|Save a new contact|name:person phone:phone|save {name} with the number {phone}|new contact {name}, {phone}|add {name} {phone} to my contacts
call contact|Make a phone call|name:person|call {name}|ring {name}|phone {name} please|get {name} on the line
read file|Read a file|path:file|show me {path}|what is in {path}?|read {path}|open {path} and read it
write file|Write text to a file|path:file content:phrase|write {content} to {path}|put {content} into {path}|save {content} as {path}
delete file|Delete a file|path:file|delete {path}|get rid of {path}|remove the file {path}
list files|List a directory|directory:dir|what files are in {directory}?|list {directory}|show the content of {directory}
rename file|Rename a file|old:file new:file|rename {old} to {new}|{old} should be called {new}
copy file|Copy a file|source:file target:file|copy {source} to {target}|duplicate {source} as {target}
run command|Run a shell command|command:shell|run {command}|execute {command}|please run the command {command}
search web|Search the web|query:phrase|search the web for {query}|look up {query} online|google {query}
get distance|Distance between two places|start:place end:place|how far is it from {start} to {end}?|distance {start} {end}|how many kilometres between {start} and {end}
rent car|Rent a car|city:place days:small|rent a car in {city} for {days} days|I need a car for {days} days in {city}
book hotel|Book a hotel room|city:place nights:small|book a hotel in {city} for {nights} nights|I need a room in {city}, {nights} nights|find me a hotel in {city} for {nights} nights
movie times|Show times of a film|film:phrase city:place|when is {film} on in {city}?|show times of {film} in {city}|where can I see {film} in {city}
get balance|Balance of an account|account:code|what is the balance of {account}?|how much money is on {account}|balance {account}
transfer money|Transfer money|amount:number recipient:person|send {amount} to {recipient}|transfer {amount} to {recipient}|pay {recipient} {amount}
create task|Add a task to a list|title:phrase list:thing|add {title} to the {list} list|put {title} on my {list} list|new task on {list}: {title}
complete task|Mark a task as done|id:int|task {id} is done|tick off task {id}|I have finished number {id}
define word|Meaning of a word|word:thing|what does {word} mean?|define {word}|meaning of {word}
current time|Time in a city|city:place|what time is it in {city}?|time in {city}|is it late in {city}
count words|Count the words of a text|text:phrase|how many words are in "{text}"?|count the words of {text}
resize image|Change the size of an image|file:file width:int height:int|resize {file} to {width} by {height}|make {file} {width} x {height}|scale {file} to {width} times {height}
take photo|Take a photo with a camera|camera:thing|take a picture with the {camera} camera|photo from the {camera} camera
water plants|Water the plants of an area|area:thing minutes:small|water the {area} for {minutes} minutes|the {area} needs {minutes} minutes of water
feed pet|Give food to a pet|pet:person grams:int|feed {pet} {grams} grams|give {pet} {grams} g of food
start robot|Start the cleaning robot|room:room|clean the {room}|send the robot into the {room}|vacuum the {room} please
get user|Look up a user|user_id:int|who is user {user_id}?|look up user {user_id}|show me the profile of {user_id}
create ticket|Open a support ticket|title:phrase priority:enum low,normal,high|open a {priority} priority ticket: {title}|file a ticket {title} with {priority} priority|new ticket, {priority}: {title}
close ticket|Close a support ticket|id:int|close ticket {id}|ticket {id} is solved|we are done with {id}
assign issue|Assign an issue to somebody|issue:int person:person|assign issue {issue} to {person}|{person} should take issue {issue}|give {issue} to {person}
restart service|Restart a service|service:slug|restart {service}|{service} hangs, restart it|bounce {service}
deploy version|Deploy a version to an environment|version:version environment:enum staging,production,test|deploy {version} to {environment}|roll out {version} on {environment}|ship {version} to {environment}
query database|Run a query|table:slug limit:int|show {limit} rows of {table}|get {limit} entries from {table}|first {limit} of {table}
check stock|How many of an item are there|item:thing|how many {item} do we have?|are there any {item} left|check the stock of {item}
order item|Order an item|item:thing quantity:small|order {quantity} {item}|I need {quantity} {item}|get me {quantity} of {item}
cancel order|Cancel an order|order:code|cancel order {order}|I don't want {order} any more|stop the order {order}
leave review|Rate a product|product:thing stars:digit|give {product} {stars} stars|rate {product} with {stars}|{stars} stars for {product}
book doctor|Make an appointment|doctor:person date:date|get me an appointment with {doctor} on {date}|I want to see doctor {doctor} on {date}
measure air|Air quality at a place|place:place|how is the air in {place}?|air quality {place}
bus stop|Next buses at a stop|stop:name line:int|when does line {line} come at {stop}?|next {line} at {stop}|bus {line} from {stop}
parking spots|Free parking spots|street:name|is there parking in {street}?|free spots near {street}|where can I park around {street}
charge battery|Charge a battery to a level|device:thing percent:int|charge the {device} to {percent} percent|{device} up to {percent}%
set brightness|Brightness of a display|display:thing level:int|set the {display} to brightness {level}|make the {display} brightness {level}
mute speaker|Mute a speaker|speaker:room|mute the speaker in the {room}|no sound in the {room}
change channel|Change the channel|channel:int|switch to channel {channel}|put on channel {channel}|I want to watch {channel}
log run|Log a run|distance:number minutes:int|I ran {distance} km in {minutes} minutes|log a run of {distance} km, {minutes} minutes
log weight|Record a weight|kilograms:number|I weigh {kilograms}|my weight today is {kilograms}|note {kilograms} kg
pick number|Draw a random number|low:int high:int|a number between {low} and {high}|pick something from {low} to {high}|random number {low} to {high}
roll dice|Roll dice|count:small sides:small|roll {count} dice with {sides} sides|throw {count} dice, {sides} sides each
add numbers|Add two numbers|a:number b:number|what is {a} plus {b}?|add {a} and {b}|sum of {a} and {b}
multiply numbers|Multiply two numbers|x:int y:int|{x} times {y}|multiply {x} by {y}|what is {x} x {y}
solve equation|Solve an equation|equation:equation|solve {equation}|what is x if {equation}
get lyrics|Words of a song|song:phrase|lyrics of {song}|what are the words of {song}?
find book|Find a book in the library|title:phrase author:person|do you have {title} by {author}?|find the book {title} by {author}|look for {title}, written by {author}
return book|Return a book|book_id:code|I bring back {book_id}|return {book_id}
lend item|Lend something to somebody|item:thing person:person|lend the {item} to {person}|{person} takes the {item}
set password|Set the password of an account|account:slug password:code|set the password of {account} to {password}|new password for {account}: {password}
block number|Block a phone number|number:phone|block {number}|no more calls from {number}
create folder|Make a folder|path:dir|make a folder {path}|create {path}|I need a folder {path}
share document|Share a document|document:file person:person|share {document} with {person}|give {person} access to {document}
print document|Print a document|file:file copies:small|print {file} {copies} times|{copies} copies of {file}|print {copies} of {file}
scan page|Scan a page|pages:small format:enum pdf,png,jpg|scan {pages} pages as {format}|make a {format} of {pages} pages
generate password|Make a password|length:small|a password with {length} characters|make me a {length} character password
get exchange|Exchange rate of a currency|currency:currency|what's the rate of {currency}?|exchange rate {currency}
plan route|Plan a route|start:name end:name mode:enum car,bike,foot|how do I get from {start} to {end} by {mode}?|route {start} to {end}, {mode}|bring me from {start} to {end} by {mode}
buy ticket|Buy tickets|event:name seats:small|buy {seats} tickets for {event}|{seats} seats at {event} please|I want to go to {event}, {seats} tickets
pause music|Pause the music|room:room|pause the music in the {room}|stop the music in the {room} for now
find person|Find an employee|name:person department:thing|find {name} in {department}|which number has {name} from {department}?
hire worker|Hire somebody|name:person role:thing|hire {name} as {role}|{name} is our new {role}
paint wall|Paint a wall|wall:thing color:color|paint the {wall} wall {color}|make the {wall} wall {color}
mix paint|Mix paint|color:color litres:number|mix {litres} litres of {color}|I need {litres} litres of {color} paint
set led|Colour of a lamp|lamp:thing color:color|make the {lamp} lamp {color}|{lamp} lamp to {color}|turn the {lamp} lamp {color}
open valve|Open a valve|valve:code percent:int|open valve {valve} to {percent} percent|{valve} {percent}% open
get sensor|Read a sensor|sensor:code|what does sensor {sensor} say?|read {sensor}|value of {sensor}
ping host|Check whether a host answers|host:host|ping {host}|is {host} up?|does {host} answer
lookup address|Look up an address|person:person|where does {person} live?|address of {person}
find hotel room|Find free rooms|hotel:name date:date|is there a room at {hotel} on {date}?|free rooms in {hotel}, {date}
join meeting|Join a meeting|meeting:code|join {meeting}|connect me to the meeting {meeting}
invite guest|Invite somebody to an event|guest:person event:phrase|invite {guest} to {event}|ask {guest} to come to {event}
report bug|Report a bug|component:slug text:phrase|there is a bug in {component}: {text}|report for {component}: {text}
archive mail|Archive mails of a sender|sender:email|archive everything from {sender}|put mails of {sender} away
get score|Result of a match|team:name|how did {team} play?|score of {team}|did {team} win
bet match|Place a bet|team:name amount:int|put {amount} on {team}|bet {amount} that {team} wins
donate money|Donate to a cause|cause:name amount:int|donate {amount} to {cause}|give {amount} to {cause}
grow crop|Plant a crop|crop:thing field:code|plant {crop} on {field}|{field} should grow {crop}
hatch egg|Start an incubator|eggs:small species:thing|incubate {eggs} {species} eggs|hatch {eggs} eggs of {species}
ship container|Ship a container|container:code port:place|send container {container} to {port}|{container} goes to {port}
weigh truck|Weigh a truck|truck:code|how heavy is {truck}?|weigh {truck}
"""
